"""Grafana's dashboards of a service, written from one table of panels."""
