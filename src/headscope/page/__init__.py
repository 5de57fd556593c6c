"""The front end: ES modules that the local page loads from its server, and the report carries within itself."""

from headscope.page.files import STATIC, files, page

__all__ = ["STATIC", "files", "page"]
