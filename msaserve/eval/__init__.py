"""Does the whole stack answer rightly? Seeded examples of five skills, their scorers, and the run over a checkpoint.

Examples need no torch: what trains a model and what judges it come from the same generators.
"""
