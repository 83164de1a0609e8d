"""Pictures and clips to patches: fetched safely, decoded in their own processes, exact to the bit, bounded.

`pipeline` is what the gateway calls. Nothing is imported here: media processes load only what they need.
"""
