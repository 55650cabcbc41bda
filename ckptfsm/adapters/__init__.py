"""Reaches the machine: files, processes, signals, threads, clocks, logs."""
