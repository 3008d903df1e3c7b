"""This process and its parent: signals, the watchdog, ending together.

signals.py    signals that ask a run to save and exit
watchdog.py   ends a run that hangs
parent.py     processes that end with the one that started them
"""
