"""Rollout workers: workflow, tokenizer and rewards in other processes, here or on other machines.

server.py       the trainer's side: leases prompts, takes finished groups
client.py       the worker's side
launcher.py     workers that a run starts itself
connection.py   one end of a connection: messages, signs of life
messages.py     requests, completions and groups as messages
"""
