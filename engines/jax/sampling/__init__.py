"""The sampler: continuous batching over slots, in a thread of the process.

sampler.py       its calls: generate, pause, swap
scheduler.py     its loop, in a thread: admit, prefill, decode, collect
programs.py      its compiled programs over a paged cache
slots.py         the request in each slot; orders.py, their state on the device
pages.py         pages of the cache, and the index of the tokens in them
cache_size.py    size of the cache
stop_strings.py  stop strings in the text of a completion
"""
