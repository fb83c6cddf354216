"""`rachis status`: what runs here, in parts."""
