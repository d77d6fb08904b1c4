"""Measurements, run by hand or by `make bench`: JSON out, nothing imports them."""
