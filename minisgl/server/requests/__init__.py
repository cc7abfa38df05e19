"""What a request asks for, as types: a conversation, its tools, its constraints."""
