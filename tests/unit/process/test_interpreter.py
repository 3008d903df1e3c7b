"""Settings of the interpreter, in a process of their own."""

import subprocess
import sys

PROGRAM = """
import gc
import sys
from rljax.process import interpreter

before = [[i] for i in range(1000)]
interval, threshold = sys.getswitchinterval(), gc.get_threshold()
interpreter.collect_less_often()
assert gc.get_threshold()[0] > threshold[0] and gc.get_threshold()[1:] == threshold[1:] and gc.get_freeze_count() == 0
gc.set_threshold(*threshold)
interpreter.settle()
watched = {id(found) for found in gc.get_objects()}
assert not any(id(made) in watched for made in before)  # exempt
after = []
after.append(after)
assert id(after) in {id(found) for found in gc.get_objects()}
del after
assert gc.collect() > 0  # garbage that is made later is found
assert sys.getswitchinterval() < interval and gc.get_threshold()[0] > threshold[0]
"""


def test_what_exists_is_exempt_and_later_garbage_is_found():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
