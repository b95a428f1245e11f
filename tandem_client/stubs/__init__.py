"""The public API's generated stubs: `make protos` copies them from protos/, with imports that name this package.

A program that uses the client therefore never imports the package name `protos`, which its own code may use.
"""
