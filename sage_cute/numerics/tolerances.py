import os
LOG=os.environ.get("SAGE_LOG")
def check(invariant, preset, value):
    value=float(value)
    if LOG: open(LOG,"a").write(f"{invariant} {preset} {value}\n")
