#!/bin/sh
ln -s birds current
