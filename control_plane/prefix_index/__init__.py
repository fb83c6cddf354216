"""Which worker holds which prefix, and how hot each prefix is: followed from Redis, answered from memory."""
