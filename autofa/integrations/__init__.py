"""autofa inside other libraries: torch's own SDPA, transformers, diffusers.

Nothing here is imported by `import autofa`, and each file imports its library only when asked to.
"""
