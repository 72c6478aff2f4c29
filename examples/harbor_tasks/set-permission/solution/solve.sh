#!/bin/sh
chmod 600 words.txt
