"""``sage-cute train``: one small decoder, trained with ``sage::attn`` and with SDPA side by side.

``data`` reads text, ``model`` builds the decoder, ``loop`` trains and records, ``report`` writes
the table, the JSON and the PNG, ``progress`` renders and ``command`` parses. Only the last three
need the extra ``train``; nothing outside this package imports it but ``sage_cute.cli``.
"""
