"""Traces of requests: which are remembered, how they are told, and which go to a collector."""
