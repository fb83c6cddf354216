"""What a decode step costs by what its requests share: `rachis bench decode-locality`."""
