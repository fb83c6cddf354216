"""`rachis batch`: a file of requests, answered by what a service has left."""
