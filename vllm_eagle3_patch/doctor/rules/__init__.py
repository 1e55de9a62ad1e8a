"""The rules: each module judges one thing, and importing it registers its rules."""
