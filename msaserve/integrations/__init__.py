"""Our operators inside other engines, as plugins that they find by entry points. Nothing here changes their code."""
