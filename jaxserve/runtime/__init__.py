"""Runs step plans on devices: the mesh, the state on the devices, the closed set of programs, and the executor.

It imports the step plan, never the scheduler.
"""
