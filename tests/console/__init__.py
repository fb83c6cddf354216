"""The console in a real browser: headless Chromium over a router with fake workers."""
