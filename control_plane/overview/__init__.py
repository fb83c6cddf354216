"""The whole service at a glance: workers summed by pool, times against objectives, what is wrong, the last hour."""
