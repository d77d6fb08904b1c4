"""Fault injection at named points, for tests of the whole system. Off, and free of cost, unless a service's settings
name faults and allow them; see `docs/failure-modes.md`."""
