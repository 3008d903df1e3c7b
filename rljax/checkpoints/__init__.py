"""Checkpoints: saving a run, and resuming it.

store.py       checkpoints of a run, written atomically; which of them are kept
integrity.py   sizes and checksums of files
disk.py        free space, write errors and syncing
background.py  saves of a learner that go on beside its next calls
recovery.py    saves and resumes a run: learner, buffer and loop
loop_state.py  state of the loop, and loop.json
export.py      Hugging Face directories from checkpoints
portable.py    a learner's state independent of the framework
"""
