"""The front end: ES modules that the local page loads from its server, and a saved report carries within itself."""

from headscope.page.files import PLOT_STYLE, STATIC, files, import_map, page
from headscope.page.onefile import one_file

__all__ = ["PLOT_STYLE", "STATIC", "files", "import_map", "one_file", "page"]
