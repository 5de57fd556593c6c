"""The local web page: `headscope serve`."""
