"""What is saved, and going on from it.

store.py       checkpoints that are whole or not there, kept by policy
integrity.py   sizes and checksums of what is saved
disk.py        room, errors and syncing of the disk
recovery.py    saving a run and taking it up again
portable.py    what a learner keeps over time, in no framework's terms
"""
