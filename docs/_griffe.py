"""What inspection of the package reports and no reader wants, removed before the API pages are made."""

import griffe


class Tidy(griffe.Extension):
    def on_attribute_instance(self, *, attr: griffe.Attribute, **_) -> None:
        attr.docstring = None  # inspection finds that of the value's type

    def on_function_instance(self, *, func: griffe.Function, **_) -> None:
        if func.name == "__init__" and func.docstring and func.docstring.value == object.__init__.__doc__:
            func.docstring = None  # an initialiser that was generated from the fields
