"""Which workers there are, what each of them has to do, and how they are called."""
