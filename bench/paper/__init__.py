"""The figures of SageBwd (arXiv 2603.02170), rerun with this package: a module each.

``python -m bench.paper.NAME`` measures at a small size on the CPU; ``--size full`` is for a GPU. A
module writes NAME-DEVICE.json and .png into bench/results/paper. On a GPU a policy without kernels
for its gradients runs by the reference on the CPU (``evaluated_on`` in the file says which), which
takes minutes at the full size: ``--policies fast accurate`` leaves most of that out.
"""
