"""Life of a process: stop signals, the watchdog, and ending with the parent process.

signals.py      handles signals that ask a run to save and exit
watchdog.py     ends a run that hangs
parent.py       ends a process when its parent ends
liveness.py     whether a process that a file names is still there
call_thread.py  blocking calls of users' code on a thread that may hang
"""
