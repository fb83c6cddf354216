"""`rachis top`: what a service does now, drawn again and again; keys sort it and open a worker or a request."""
