"""Conversations as token ids and back, by a model's own template.

messages.py is what users write; template.py renders it, with control_tokens.py seeing to it that
no text of theirs becomes a control token; labeled_turns.py finds what is learned in it. Of a reply,
reasoning.py and tool_calls.py read what its text holds. pictures.py has the images of a message.
"""
