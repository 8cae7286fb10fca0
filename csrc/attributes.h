// Arguments of Python, read by the names of their attributes. Included after Python.h.
#pragma once

#include <cstdint>

namespace lamina {

// A name that calls look up again and again.
class Name {
 public:
  explicit Name(const char* text) : text_(PyUnicode_InternFromString(text)) {}
  operator PyObject*() const { return text_; }

 private:
  PyObject* text_;
};

// An object. Once an exception is set there is none, and what is read of it is 0: callers ask for exceptions at the end.
class Attribute {
 public:
  explicit Attribute(PyObject* object) : object_(Py_NewRef(object)) {}
  Attribute(const Attribute&) = delete;
  ~Attribute() { Py_XDECREF(object_); }

  Attribute operator[](PyObject* name) const {
    return {object_ && !PyErr_Occurred() ? PyObject_GetAttr(object_, name) : nullptr, Owned{}};
  }

  bool is_none() const { return object_ == Py_None; }
  std::int64_t integer() const { return object_ ? PyLong_AsLongLong(object_) : 0; }
  float real() const { return object_ ? float(PyFloat_AsDouble(object_)) : 0; }

  // Where a tensor's numbers lie. The caller keeps the tensor.
  template <class T>
  T* address() const {
    static const Name data_ptr("data_ptr");
    if (!object_ || PyErr_Occurred()) return nullptr;
    PyObject* const number = PyObject_CallMethodNoArgs(object_, data_ptr);
    void* const at = number ? PyLong_AsVoidPtr(number) : nullptr;
    Py_XDECREF(number);
    return static_cast<T*>(at);
  }
  // The same; null for None.
  template <class T>
  T* address_or_null() const {
    return is_none() ? nullptr : address<T>();
  }

 private:
  struct Owned {};
  Attribute(PyObject* object, Owned) : object_(object) {}

  PyObject* object_;
};

}  // namespace lamina
