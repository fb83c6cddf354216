"""Engines that prefill and decode: both pools' schedulers in one."""
