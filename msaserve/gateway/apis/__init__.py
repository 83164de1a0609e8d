"""The APIs that clients speak: their requests and answers. Chat is what all of them become."""
