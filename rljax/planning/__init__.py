"""Plans of runs: which memory and time a config takes on devices that nobody has rented yet.

footprint.py   memory of a device by component, at the moments when it is fullest
widths.py      sizes of a layer's activations, and of keys and values
model_shape.py shape of a model that is planned for, from its directory or the config that makes it
load.py        tokens of an average episode and step
rates.py       time of a step by roofline, and which side waits
program.py     a program of a plan, compiled or tried without devices
planner.py     interface of an engine that can be planned for
estimate.py    plan of a config: memory of each group of devices, and the time of each side
changes.py     configs that need less, and the largest that fits
balance.py     split of the devices between sampler and learner
counted.py     numbers with their nouns
text.py        a plan as text and as JSON
run.py         estimate of a run on the devices that it has
"""
