# What the bucket refuses, whoever asks. It grants nothing to people or workloads: iam.tf does.
data "aws_iam_policy_document" "bucket" {
  statement {
    sid       = "DenyWithoutTls"
    effect    = "Deny"
    actions   = local.all_actions
    resources = local.everything

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }

  statement {
    sid       = "DenyOldTls"
    effect    = "Deny"
    actions   = local.all_actions
    resources = local.everything

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "NumericLessThan"
      variable = local.express ? "s3express:TlsVersion" : "s3:TlsVersion"
      values   = ["1.2"]
    }
  }

  # A request that names an encryption must name the bucket's. One that names none, as s3kv's does
  # without put_headers, gets the bucket's anyway, and must pass: StringNotEquals also matches a header that is not
  # there, with or without IfExists, so "is there" has to be said. A directory bucket refuses
  # another encryption by itself.
  dynamic "statement" {
    for_each = local.express ? {} : local.encryption_headers

    content {
      sid       = statement.key
      effect    = "Deny"
      actions   = ["s3:PutObject"]
      resources = ["${local.bucket_arn}/*"]

      principals {
        type        = "*"
        identifiers = ["*"]
      }

      condition {
        test     = "Null"
        variable = statement.value.header
        values   = ["false"]
      }

      condition {
        test     = "StringNotEquals"
        variable = statement.value.header
        values   = [statement.value.allowed]
      }
    }
  }

  # A request that names KMS and no key gets AWS's own key (aws/s3), not the bucket's.
  dynamic "statement" {
    for_each = local.express || var.kms_key_arn == null ? [] : [1]

    content {
      sid       = "DenyKmsWithoutKey"
      effect    = "Deny"
      actions   = ["s3:PutObject"]
      resources = ["${local.bucket_arn}/*"]

      principals {
        type        = "*"
        identifiers = ["*"]
      }

      condition {
        test     = "Null"
        variable = "s3:x-amz-server-side-encryption"
        values   = ["false"]
      }

      condition {
        test     = "Null"
        variable = "s3:x-amz-server-side-encryption-aws-kms-key-id"
        values   = ["true"]
      }
    }
  }

  # An object encrypted with a key that the caller sends (SSE-C) can be read by nobody who lacks that
  # key. A request that names no such key must pass, hence Null. Directory buckets have no SSE-C.
  dynamic "statement" {
    for_each = local.express ? [] : [1]

    content {
      sid       = "DenyCustomerKeys"
      effect    = "Deny"
      actions   = ["s3:PutObject"]
      resources = ["${local.bucket_arn}/*"]

      principals {
        type        = "*"
        identifiers = ["*"]
      }

      condition {
        test     = "Null"
        variable = "s3:x-amz-server-side-encryption-customer-algorithm"
        values   = ["false"]
      }
    }
  }

  # In a directory bucket, expiry is done by a service that needs a session like anybody else.
  dynamic "statement" {
    for_each = local.express ? [1] : []

    content {
      sid       = "AllowExpiry"
      actions   = ["s3express:CreateSession"]
      resources = [local.bucket_arn]

      principals {
        type        = "Service"
        identifiers = ["lifecycle.s3.amazonaws.com"]
      }

      condition {
        test     = "StringEquals"
        variable = "s3express:SessionMode"
        values   = ["ReadWrite"]
      }

      condition {
        test     = "StringEquals"
        variable = "aws:SourceAccount"
        values   = [local.account]
      }
    }
  }
}

locals {
  all_actions = [local.express ? "s3express:*" : "s3:*"]
  everything  = local.express ? [local.bucket_arn] : [local.bucket_arn, "${local.bucket_arn}/*"]

  encryption_headers = merge(
    {
      DenyWrongEncryption = {
        header  = "s3:x-amz-server-side-encryption"
        allowed = local.sse_algorithm
      }
    },
    var.kms_key_arn == null ? {} : {
      DenyWrongKey = {
        header  = "s3:x-amz-server-side-encryption-aws-kms-key-id"
        allowed = var.kms_key_arn
      }
    },
  )
}

resource "aws_s3_bucket_policy" "this" {
  bucket = local.bucket
  policy = data.aws_iam_policy_document.bucket.json

  # S3 refuses changes to one bucket that come at the same time.
  depends_on = [aws_s3_bucket_public_access_block.this, aws_s3_bucket_ownership_controls.this]
}
