"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("sparklane")
except PackageNotFoundError:
    # The source tree is run without having been installed.
    VERSION = "0.0.0"
