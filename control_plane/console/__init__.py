"""The console: a page beside `/metrics`, and the admin API over HTTP that it is drawn from."""
