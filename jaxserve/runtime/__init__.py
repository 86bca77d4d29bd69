"""What runs where: the mesh, the state on the device, the closed set of programs, and the executor that feeds them.

Knows step plans, never the scheduler.
"""
