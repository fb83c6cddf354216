"""What engine steps, copies and transfers cost: by public figures of a GPU and a model, or as measured."""
