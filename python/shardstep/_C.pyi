version: str
torch_version: str
