"""Plans of runs: which memory and time a config takes on devices that nobody has rented yet.

footprint.py   memory of a device by component, at the moments when it is fullest
widths.py      sizes of a layer's activations, and of keys and values
load.py        tokens of an average episode and step
program.py     a program of a plan, compiled or tried without devices
planner.py     interface of an engine that can be planned for
estimate.py    plan of a config: memory of each group of devices, and the time of each side
changes.py     configs that need less, and the largest that fits
balance.py     split of the devices between sampler and learner
counted.py     numbers with their nouns
text.py        a plan as text and as JSON
"""
