"""Replay: which records are read, which version answers them, how answers are held against the log, what is reported.

Pure. The command line (sie_stream/cli/replay.py) reads the topics and runs the engines.
"""
