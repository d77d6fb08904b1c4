"""Manifests and images of Twostroke, and the checks on them (`python -m k8s.validate`). Not installed."""
