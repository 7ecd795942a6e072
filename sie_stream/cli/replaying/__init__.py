"""The edges of `sie-stream replay`: topics in, engine processes, reports out."""
