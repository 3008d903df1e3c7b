"""Rollout workers: workflow, tokenizer and rewards in other processes, on this host or on others.

server.py       the trainer's side: leases prompts, takes finished groups
attached.py     a worker as that side sees it
client.py       the worker's side
launcher.py     starts a run's own workers
connection.py   one end of a connection: messages and heartbeats
messages.py     requests, completions and groups as messages
files.py        sends and receives model directories
"""
