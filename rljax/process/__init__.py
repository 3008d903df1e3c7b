"""Life of a process: stop signals, the watchdog, and ending with the parent process.

signals.py        handles signals that ask a run to save and exit
first_signals.py  the same while a command still imports its parts
watchdog.py       ends a run that hangs; guardian.py, one that holds the interpreter
parent.py         ends a process when its parent ends
stages.py         says what takes long at a start
child.py          child processes of the event loop
descendants.py    ends a child with all that it started
liveness.py       whether a process that a file names is still there
tasks.py          background tasks whose end is seen
call_thread.py    blocking calls of users' code on a thread that may hang
standard_streams.py  streams that a process was started without
thread_pool.py    threads for what others can ask for without end
environment.py    variables of processes that run other people's code
frames.py         tracebacks of that code
interpreter.py    settings of Python where many episodes run beside a device
memory.py         memory of this process; heap.py keeps what is freed
"""
