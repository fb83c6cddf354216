"""Files for `ray up`: read, checked against a service, and told as a dry run."""
