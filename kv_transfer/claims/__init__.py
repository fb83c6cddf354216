"""What a worker says of the prefixes that it holds, and how prefixes are named."""
