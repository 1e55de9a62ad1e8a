ALLOWED = ["llama"]
